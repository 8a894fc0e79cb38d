"""From text to batches: tokenizers, JSON Lines, Megatron's indexed files, datasets, samplers.

Owns the files that hold a data set, and how samples are drawn from them. Fed by the commands
`preprocess_data`, `merge_datasets` and `sample_corpus`, which write data, and by `training.job`,
which reads data. Only `datasets` imports torch.

    preprocessing.py   all steps from JSON Lines to a finished data set: start reading here
    documents.py       files to lines to token ids, in worker processes
    tokenizers.py      text to ids and back
    indexed.py         ``.bin`` and ``.idx``, read and written; PREFIX.json says what the ids mean
    blend.py           the data flags: a blend's parts, a split's bounds
    datasets.py        indexed files to samples to streams of microbatches
"""
