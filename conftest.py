"""Settings that must be in place before torch and triton are imported."""

import os

# Triton reads this when a kernel is defined; without an accelerator its interpreter runs the kernels on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")
# two busy-waiting thread pools on two cores are several times slower than one thread each
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
