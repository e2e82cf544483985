"""What the kernels of the `cuda` targets share. Must not know: builder, runtime."""
