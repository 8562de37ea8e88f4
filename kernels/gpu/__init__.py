"""Triton kernels: the one folder that imports triton. Imported by the wrappers in kernels/*.py when a call takes one.

A module holds `@triton.jit` functions whose names end in `_kernel`, the functions that launch them (arguments have been
checked by the wrapper), and `CASES`: launches that stand for all of them, which `make kernels-aot` compiles for GPUs
that aren't there (see `case.Case`). What helps kernels (a jit function that others call) has another name.

Rules, since Triton 3.6 to 3.8 and its interpreter have to agree:

- Every launch goes through `common.launch`; its first argument is a tensor of the device to launch on.
- Convert to float32 right after a load, and multiply matrices by `common.dot`: on bfloat16 the interpreter computes
  with the raw bits, silently. Nothing but loads, stores and conversions touches a bfloat16.
- Offsets are int64 before a block id, slot, head, row or token number is multiplied by a stride.
- Masks stand on loads, not on what was loaded: what isn't a sequence's own may be NaN.
- Pointers with masks only: no block pointers (gone from 3.9), no libdevice, no inline assembly, no autotuning.
- A number that changes from step to step (tokens, layer) is named in `do_not_specialize`: the first launch with a value
  of 1 or a multiple of 16 would compile again.
"""
