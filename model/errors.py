"""Named errors of the model floor. Each message is one line that says what is wrong, where, and what to do."""


class ModelError(Exception):
    """Root of everything the model floor raises on purpose."""


class ModelNotFoundError(ModelError):
    """There is no checkpoint at this path."""


class CorruptCheckpointError(ModelError):
    """A checkpoint's file is damaged, cut short, or contradicts itself."""


class UnsupportedModelError(ModelError):
    """The checkpoint is sound, but it asks for something that Pagemill can't compute exactly."""


class UnsupportedCacheError(ModelError):
    """The KV cache can't be kept in this number format on this device."""


class CheckpointCacheError(ModelError):
    """The converted checkpoint can't be written: no space, or no permission."""


class TokenizerError(ModelError, ValueError):
    """This text or these ids can't be translated."""


class ChatTemplateError(ModelError, ValueError):
    """These messages can't be rendered: they are malformed, or the template refuses them."""


class WeightsMismatchError(ModelError, ValueError):
    """The tensors of a checkpoint aren't those that its configuration asks for."""


class RunnerInputError(ModelError, ValueError):
    """A step asks the model runner for what it doesn't hold, or has no room for."""


class StepTooLargeError(ModelError):
    """The largest step that the limits allow doesn't fit into memory; the message says which limit to lower."""


class TooLittleMemoryError(ModelError, MemoryError):
    """A file of the checkpoint is sound, but there is too little memory, or address space, to map it."""
