"""Every test. Shared builders and fakes are modules of this package: `from tests import make, fakes`."""
