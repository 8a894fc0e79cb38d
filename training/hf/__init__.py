"""Models of Hugging Face folders, in and out: configuration, weights, tokenizer.

Owns what a folder's ``config.json`` means in the trainer's flags, and which of its tensors make
which of Megatron-Core's. Fed by `training.convert` and ``--load-hf``; works on the model chunks of
one rank in any parallel layout. Start reading at families.py, then rules.py.

    families.py  GPT-2, Llama, Mistral, Qwen, Mixtral: config.json, key by key, to flags and back
    rules.py     the table of tensors: Hugging Face's, Megatron-Core's, and how to convert them
    weights.py   in: files of tensors, mapped for reading, into the model chunks of this rank, layer
                 by layer; files written one tensor at a time
    saving.py    out: a checkpoint as a folder; `convert --check`, the same text through both models
"""
