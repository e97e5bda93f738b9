// The element types that the kernels read, by the name that the host dispatches on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mla {

enum class Element { kBf16, kFp16, kFp32 };

// Calls `body` with a value of the C++ type that `element` names, so that a generic lambda can take its type.
template <typename Body>
void with_element(Element element, Body&& body) {
  switch (element) {
    case Element::kBf16:
      return body(__nv_bfloat16{});
    case Element::kFp16:
      return body(__half{});
    case Element::kFp32:
      return body(float{});
  }
}

inline int bytes_of(Element element) { return element == Element::kFp32 ? 4 : 2; }

}  // namespace mla
