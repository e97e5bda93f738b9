"""Every installed adapter, held to what it declares: limits on any machine, numbers where its kernel runs."""

from mla_backends.testing import Conformance, installed_adapters


class TestInstalled(Conformance):
    adapters = installed_adapters()
