"""A DeepSeek-V3 of Hugging Face transformers, decoded through mla_backends: what an engine does, in its order.

    python examples/transformers_decode.py             # float32 on a CPU: the tokens of transformers' own generate()
    python examples/transformers_decode.py --device cuda --dtype bfloat16 --adapter flashmla --heads 128

The weights are random and the model is small, its attention has the real widths. transformers' own attention prefills
while our cache is filled; from then on a batch of ragged prompts is decoded over latent rows, and no key or value is
expanded again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

from mla_backends import AbsorbWeights, DecodePlan, Geometry, Query, UnifiedCache, get_backend, softmax_scale

PROMPT_LENS = (5, 64, 130)  # within a page, a page to the last row, over two pages
NEW_TOKENS = 40
PAGE_SIZE = 64  # what every kernel takes; `Backend.page_sizes` lists what else some take
FORMATS: dict[str, Any] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Engine:
    """The model with its attention replaced: one paged cache for all layers, one plan for all layers and steps.

    Args:
        model: a DeepseekV3ForCausalLM; its attention modules are this engine's from here on.
        num_pages: of the cache, shared by all requests.
        adapter: the one to use; None is the best that runs on the model's device.
    """

    def __init__(self, model: Any, *, num_pages: int, adapter: str | None = None) -> None:
        self.model, self.device = model, model.device
        self.backend = get_backend(adapter=adapter, device=self.device)
        self.geometry = Geometry.from_config(model.config)
        # Not 192 ** -0.5: YaRN multiplies it, and a model decodes fluently, and wrongly, without.
        self.scale = softmax_scale(model.config)
        layers = model.model.layers
        # Block-major: a page of all layers is one piece of memory, so one page id and one slot serve every layer.
        cache_format = FORMATS[str(model.dtype).removeprefix("torch.")]
        self.cache = UnifiedCache.allocate(num_pages, len(layers), PAGE_SIZE, cache_format, self.device)
        # kv_b_proj is taken apart once, at load: W_UK goes into the query, W_UV behind the attention.
        projections = [layer.self_attn.kv_b_proj.weight for layer in layers]
        self.weights = [AbsorbWeights.from_kv_b_proj(weight, self.geometry) for weight in projections]
        # What all layers of one forward pass share, set by `generate`: the tokens' slots, and no plan while prefilling.
        self.slot_mapping = torch.empty(0, dtype=torch.int64, device=self.device)
        self.decoding: tuple[DecodePlan, Query] | None = None
        for i, layer in enumerate(layers):
            attn = layer.self_attn
            attn.forward = partial(self._attention, i, attn, attn.forward)

    def _attention(
        self, i: int, attn: Any, own_forward: Any, hidden_states: Tensor, position_embeddings: Any, **rest: Any
    ) -> Any:
        """In place of `DeepseekV3Attention.forward`: hidden_states [B, S, hidden], S is 1 where there is a plan."""
        widths, cache, weights = self.geometry, self.cache.layer(i), self.weights[i]
        # As the model does it, up to the point where it would expand the latent into keys and values.
        if attn.q_lora_rank is None:
            q = attn.q_proj(hidden_states)
        else:
            q = attn.q_b_proj(attn.q_a_layernorm(attn.q_a_proj(hidden_states)))
        q = q.unflatten(-1, (widths.num_heads, -1))
        q_nope, q_pe = q.split([widths.qk_nope_head_dim, widths.qk_rope_head_dim], -1)
        kv = attn.kv_a_proj_with_mqa(hidden_states)
        kv_c, k_pe = kv.split([widths.kv_lora_rank, widths.qk_rope_head_dim], -1)
        # The cache holds the latent after its norm and the key after its rotation. DeepSeek's checkpoints interleave
        # the pairs that rotate together, transformers takes them apart; a score asks only that q and k agree on that.
        rotate: Any = modeling.apply_rotary_pos_emb
        if attn.config.rope_interleave:
            rotate = modeling.apply_rotary_pos_emb_interleave
        q_pe, k_pe = rotate(q_pe, k_pe.unsqueeze(2), *position_embeddings, unsqueeze_dim=2)
        cache.write(attn.kv_a_layernorm(kv_c).flatten(0, 1), k_pe.flatten(0, 2), self.slot_mapping)
        if self.decoding is None:  # prefill: its own attention, which computes the above once more for itself
            return own_forward(hidden_states=hidden_states, position_embeddings=position_embeddings, **rest)
        plan, query = self.decoding
        # Into the plan's own buffer, of the heads, dtype and layout that the kernel wants: nothing is concatenated.
        weights.query(q_nope.squeeze(1), q_pe.squeeze(1), out=query)
        latent = plan.run(query, cache).out
        return attn.o_proj(weights.project(latent).flatten(1)).unsqueeze(1), None

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Tensor], new_tokens: int, *, feed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Prefill a batch of ragged prompts, then decode it greedily, a token of each request a step.

        Args:
            prompts: B tensors [n] of token ids, each of its own n.
            new_tokens: of each request.
            feed: [B, new_tokens], fed back in place of the chosen tokens, so that two models' logits can be compared.

        Returns:
            The chosen tokens [B, new_tokens] and the logits that they were chosen by, [B, new_tokens, vocabulary].
        """
        # Lengths live on both sides: kernels read the device's, for which an adapter that plans on the host would wait.
        lens_cpu = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        lens = lens_cpu.to(self.device)
        block_table = self._allocate_pages(lens_cpu + new_tokens).to(self.device)

        # Prefill, padded on the right: under a causal mask no token sees the padding behind it, and a negative slot
        # keeps the padding out of the cache.
        padded = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(self.device)
        positions = torch.arange(padded.shape[1], device=self.device).expand_as(padded)
        slots = slots_of(positions, block_table)
        self.decoding, self.slot_mapping = None, slots.where(positions < lens[:, None], -1).flatten()
        hidden = self.model.model(input_ids=padded, use_cache=False).last_hidden_state
        rows = torch.arange(len(prompts), device=self.device)
        logits = [self.model.lm_head(hidden[rows, lens - 1])]

        # One plan for all layers and all steps: its capacity is the table's, its lengths are each step's.
        plan = self.backend.plan(
            self.cache.layer(0), block_table, lens, num_heads=self.geometry.num_heads, softmax_scale=self.scale,
            seq_lens_cpu=lens_cpu,
        )  # fmt: skip
        self.decoding = plan, plan.new_query()
        tokens = [logits[0].argmax(-1)]
        for step in range(new_tokens - 1):
            token = tokens[-1] if feed is None else feed[:, step]
            positions = lens.long()[:, None]  # the new token's: as many as there are keys before it
            self.slot_mapping = slots_of(positions, block_table).flatten()
            # Lengths count the new token, whose key every layer writes before it reads. Once a step, never once a
            # layer; an engine that hands out pages as requests grow gives the new table here too.
            lens, lens_cpu = lens + 1, lens_cpu + 1
            plan.update(seq_lens=lens, seq_lens_cpu=lens_cpu)
            # The model's mask and cache are left out: both are the plan's affair now.
            hidden = self.model.model(input_ids=token[:, None], position_ids=positions, use_cache=False)
            logits.append(self.model.lm_head(hidden.last_hidden_state[:, 0]))
            tokens.append(logits[-1].argmax(-1))
        return torch.stack(tokens, 1), torch.stack(logits, 1).float()

    def _allocate_pages(self, lens: Tensor) -> Tensor:
        """[B, W] int32: pages for so many tokens, from all over the cache; columns past a row's own are never read."""
        needed = -(-lens // PAGE_SIZE)
        num_pages = self.cache.data.shape[0]
        if int(needed.sum()) > num_pages:
            raise ValueError(f"{int(needed.sum())} pages are needed, the cache has {num_pages}; allocate more")
        taken = torch.arange(int(needed.max())) < needed[:, None]
        free = torch.randperm(num_pages, dtype=torch.int32)
        return torch.zeros(taken.shape, dtype=torch.int32).masked_scatter(taken, free)


def slots_of(positions: Tensor, block_table: Tensor) -> Tensor:
    """[B, S] int64: where the tokens at these positions [B, S] lie in the cache, in any layer of it."""
    return block_table.gather(1, positions // PAGE_SIZE).long() * PAGE_SIZE + positions % PAGE_SIZE


# --- the model, and what it says itself -----------------------------------------------------------------------------


def small_config(*, heads: int = 8, layers: int = 3) -> DeepseekV3Config:
    """DeepSeek-V3's attention, YaRN included, in a model that a laptop decodes.

    Every token goes to every expert: a choice that flips between two roundings would hide what attention adds.
    """
    return DeepseekV3Config(
        vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=layers,
        n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=1,
        num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=128, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840, initializer_range=0.06, eos_token_id=None,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip


def build_model(config: DeepseekV3Config, dtype: torch.dtype, device: str) -> Any:
    """The same weights in any dtype, as of one bf16 checkpoint: what then differs is arithmetic alone."""
    torch.manual_seed(0)
    from_config: Any = AutoModelForCausalLM.from_config
    checkpoint = from_config(config, dtype=torch.float32).bfloat16().state_dict()
    # Not .to(dtype), which would round the frequencies of the rotary embedding as well.
    model = from_config(config, dtype=dtype)
    model.load_state_dict(checkpoint)
    return model.to(device).eval()


def random_prompts(lens: Sequence[int], vocabulary: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (n,), generator=generator).to(device) for n in lens]


@torch.inference_mode()
def own_generation(model: Any, prompts: Sequence[Tensor], new_tokens: int) -> tuple[Tensor, Tensor]:
    """What `Engine.generate` gives, by transformers' generate(): each prompt alone, with no padding to get wrong."""
    tokens, logits = [], []
    for prompt in prompts:
        said = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=new_tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens.append(said.sequences[0, len(prompt) :])
        logits.append(torch.cat(said.logits))
    return torch.stack(tokens), torch.stack(logits).float()


@torch.inference_mode()
def own_logits(model: Any, prompts: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """[B, new_tokens, vocabulary]: the model's logits where `tokens` followed the prompts, in one forward of each."""
    fed = [torch.cat((prompt, row[:-1])) for prompt, row in zip(prompts, tokens, strict=True)]
    return torch.stack([model(row[None], use_cache=False).logits[0, -tokens.shape[1] :] for row in fed]).float()


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Of the decoded tokens; a prompt's own next token comes from the prefill, which is not ours."""
    return float((found[:, 1:] - truth[:, 1:]).norm() / truth[:, 1:].norm())


def main() -> int:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if has_gpu else "float32", choices=tuple(FORMATS))
    parser.add_argument("--adapter", help="the one to use (default: the best that runs)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args()

    config = small_config(heads=args.heads, layers=args.layers)
    prompts = random_prompts(PROMPT_LENS, config.vocab_size, args.device)
    # transformers speaks first, in float32: its tokens are what everyone is asked about.
    tokens, truth = own_generation(build_model(config, torch.float32, args.device), prompts, NEW_TOKENS)
    model = build_model(config, getattr(torch, args.dtype), args.device)
    own = own_logits(model, prompts, tokens)
    engine = Engine(model, num_pages=32, adapter=args.adapter)
    feed = None if args.dtype == "float32" else tokens
    chosen, ours = engine.generate(prompts, NEW_TOKENS, feed=feed)
    assert engine.decoding is not None
    facts = engine.decoding[0].describe()
    print(f"adapter {facts['adapter']} ({facts['provider']} {facts['version']}), {args.dtype}, {args.heads} heads")
    print(f"tokens as transformers' in float32: {int((chosen == tokens).sum())} of {tokens.numel()}")
    print(f"logits, largest difference from transformers' in float32: {float((ours - truth).abs().max()):.2e}")
    if args.dtype == "float32":
        return int(not torch.equal(chosen, tokens) or not float((ours - truth).abs().max()) <= 1e-4)
    error, own_error = relative_error(ours, truth), relative_error(own, truth)
    print(f"logits, relative error against float32: {error:.2e}, of the model's own {args.dtype}: {own_error:.2e}")
    print(f"logits, relative difference from the model's own {args.dtype}: {relative_error(ours, own):.2e}")
    # Both round as often, at other places: measured, the two errors are within 3% of each other.
    return int(not error <= 1.5 * own_error)


if __name__ == "__main__":
    sys.exit(main())
