"""The stages in C++ (`_native`, compiled for several SIMD levels) and in NumPy (`reference`), value for value the same.

The level is chosen when the module is imported; the environment variable CPSGD_SIMD (baseline, avx2 or avx512) forces
one.
"""
