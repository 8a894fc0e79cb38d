"""Pipeline schedules as plans: made, checked, predicted, searched for, and carried out.

Planning (plan, notation, validity, generators, simulator, planner, disaggregation, costs, remedies)
is free of torch, so that `megascan plan` runs where traces are read. What carries a plan out
imports torch and megatron.core and is imported by the trainer and its helpers alone.
"""
