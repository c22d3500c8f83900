"""GPU kernels, one op a file, installed as ``zlm.kernels``. Flat: no sub-packages."""
