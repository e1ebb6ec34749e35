"""The way a trainer calls its workers and fetches rollouts.

Only the modules whose names begin with ``rpc`` touch ``torch.distributed.rpc``.
"""
