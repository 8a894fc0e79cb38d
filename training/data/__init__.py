"""From text to batches: tokenizers, JSON Lines, Megatron's indexed files, datasets, sampling.

Rooms: `tokenizers` and `subword` (text to ids), `documents` (files to lines to texts), `encoding`
(lines to ids, in worker processes), `indexed` (ids to ``.bin``/``.idx`` and back), `corpus`
(English from the installed Python), `settings` (the data flags), `datasets` (indexed files to
samples), `batches` (samples to microbatches). Only the last two, and writing, import torch.
"""
