"""The reference trainer: GPT on Megatron-Core, started by torchrun.

Owns a training run from its command line to its last checkpoint, and what goes in and comes out:
data, checkpoints, Hugging Face folders, generated text, planted faults. Fed by flags with
Megatron-LM's names. Tracing is one callback of the loop; nothing here knows how a trace is
analysed.

    pretrain_gpt.py   the command; job.py builds a run from its flags: start reading here
    arguments/        flags, and the check that they fit together
    loop.py           iterations; step.py the passes of one iteration; callback.py who watches
    model.py          chunks, optimizer, learning-rate schedule; origin.py where weights come from
    data/             text to microbatches of each rank; sample_corpus.py, preprocess_data.py and
                      merge_datasets.py are the commands that make data
    checkpoint.py     saving and loading; checkpoint_folder.py what a checkpoint says of itself;
                      convert.py and hf/ Hugging Face folders
    pipeline/         schedules as plans of actions; helper.py runs forwards outside the job
    generation/       text out of a checkpoint; generate.py and serve.py are the commands for it
    faults/           what --inject-fault makes slow
    distributed.py    joining the job and leaving it; cpu_backend.py without CUDA
    log.py            what a run prints; scope.py MegaScope in the trainer
"""

__megascan__ = True
