"""Messages of torch and Megatron-Core that nobody who trains could act on, and nothing else.

Each is named by the text it begins with: whatever else is warned of is still seen. Their cause is
known in every case: optional packages that this trainer does not use, names that Megatron-Core
takes from torch, caches that made-up data do without, advice about GPUs on the CPU.
"""

from __future__ import annotations

import logging
import re
import warnings

_WARNINGS = (
    r"Transformer Engine and Apex are not installed\. ",
    r"Apex is not installed\. ",
    r"full scope is deprecated\. ",
    r"moe_ffn_hidden_size is not set, ",
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated\. ",
    r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is deprecated\. ",
    r"`load_state_dict` is deprecated and will be removed in future versions\. ",
    r"Please use DTensor instead and we are deprecating ShardedTensor\.",
)
# True anywhere else; Megatron-Core's optimizer only asks whether a slice of the weights has one.
_WARNING_OF_OPTIMIZER = r"The \.grad attribute of a Tensor that is not a leaf Tensor is being "
_WARNINGS_OF_GPUS = (
    r"When using (sequence parallelism|async grad allreduce) it is recommended to set the "
    r"environment variable CUDA_DEVICE_MAX_CONNECTIONS ",
)
_DATASET_LOGGER = "megatron.core.datasets.gpt_dataset"
_DATASET_MESSAGE = re.compile("Unable to save MockGPTDataset indexes because path_to_cache is None")


def silence(device: str) -> None:
    """Leave those messages out in this process; call it before megatron.core is imported."""
    for message in _WARNINGS + (_WARNINGS_OF_GPUS if device == "cpu" else ()):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings(
        "ignore", message=_WARNING_OF_OPTIMIZER, module=r"megatron\.core\.optimizer\."
    )
    logging.getLogger(_DATASET_LOGGER).addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return _DATASET_MESSAGE.match(record.getMessage()) is None
