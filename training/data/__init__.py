"""From text to batches: tokenizers, JSON Lines, Megatron's indexed files, datasets, sampling.

Rooms: `tokenizers` and `subword` (text to ids), `documents` (files to lines to texts), `encoding`
(lines to ids, in worker processes), `indexed` and `index_writer` (``.bin``/``.idx`` read and
written), `description` (what their ids mean), `work_folder` and `restart` (outputs in the making,
continued after an interruption), `preprocessing` (all of these in order), `corpus` (English from
the installed Python), `settings` (the data flags), `datasets` (indexed files to samples),
`batches` (samples to microbatches). Only the last two import torch.
"""
