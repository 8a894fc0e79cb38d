"""Text out of a model: cache, scheduler, sampling, the loop over tensor and pipeline ranks, HTTP.

Nothing is imported here: megatron.core may be imported only when the job has been joined, and the
command line is read before that.
"""
