"""The ranks of a group: rank 0 schedules, the others compute their parts of the same steps.

protocol   what rank 0 tells the others, and the digests by which they see that they compute the same
group      rank 0's side: starts the other processes, tells, watches
process    another rank's side
"""
