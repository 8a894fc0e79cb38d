"""The reference trainer: GPT on Megatron-Core, started by torchrun.

Owns a training run from its command line to its last checkpoint, and what goes in and comes out:
data, checkpoints, Hugging Face folders, generated text, planted faults. Fed by flags with
Megatron-LM's names. Tracing is one callback of the loop; nothing in here knows how a trace is
analysed.

    pretrain_gpt.py   the command; job.py builds a run from its flags: start reading here
    arguments/        flags, and the check that they fit together
    loop.py           iterations; step.py one of them; callback.py who watches
    model.py          chunks, optimizer, learning-rate schedule; origin.py where weights come from
    data/             text to microbatches of each rank
    checkpoint*.py    saving and loading; convert.py and hf/ Hugging Face folders
    pipeline/         schedules as plans of actions
    generation/       text out of a checkpoint; generate.py and serve.py are its commands
    faults/           what --inject-fault makes slow
    distributed.py    joining the job and leaving it; cpu_backend.py without CUDA
    log.py            what a run prints
"""

__megascan__ = True
