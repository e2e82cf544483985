"""What all kernels of the cpu target share: the C ABI, the step's context, vector lanes, and `CpuCall`.

Must not know: builder, runtime, any operator.
"""

#: What a translation unit that includes a kernel is compiled with, beside -I INCLUDE_ROOT, -O3, -march and -pthread.
#: Contraction would fuse multiplies and adds differently on each ISA level, and results would differ.
CXX_FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
