"""Named errors of the kernels."""


class KernelError(Exception):
    """Root of everything the kernels raise on purpose."""


class KernelInputError(KernelError, ValueError):
    """A tensor has a shape, dtype, stride or device that the kernel does not accept; the message says which and why."""
