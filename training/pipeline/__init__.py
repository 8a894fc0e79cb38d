"""Pipeline schedules as plans: made, checked, predicted, searched for, and carried out.

Owns which action each pipeline rank carries out when. Fed by the trainer's flags, or by a trace
whose costs `megascan plan` takes; hands the trainer a step of Megatron-Core's interface. Start
reading at plan.py.

    on paper, free of torch, so that `megascan plan` runs where traces are read
      plan.py         a schedule as lists of actions, and as text; drawing.py shows it
      generators.py   plans by rule; planner.py searches for a fast plan; guided.py says when to
                      leave a plan
      simulator.py    whether a plan can be carried out, and how long it takes; costs.py work in
                      seconds and bytes
      measured.py     costs of a traced job, and the job under other circumstances
      remedies.py     what would help a traced job, balanced shares among it; disaggregation.py:
                      forwards on helpers
    in a job, with torch and megatron.core, imported by the trainer and its helpers alone
      running.py      the pipeline of a job; schedule.py chooses its plan from the flags
      executor.py     carries a plan out, and times it; dynamic.py chooses while it runs
      channels.py     messages between stages; copies.py by copy engines, where GPUs share a host
      helped.py       forwards on helpers (reception.py); rebalance.py moves and orders
                      microbatches
      split_backward.py  weight gradients on their own
"""
