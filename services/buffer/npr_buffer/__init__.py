"""The `buffer` service: work queue and experience of all runs, durable in Redis or Valkey.

The life of a group: a client enqueues it (`lua/enqueue.lua`), a worker leases it (`leasing.py` chooses the run,
`lua/lease.lua` the groups), scored trajectories are appended (`lua/append.lua`) until it is READY, a consumer reads and
acknowledges it (`lua/ack.lua`). Each mutation is one atomic script on the keys of one run.
"""
