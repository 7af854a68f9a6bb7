"""A cluster of replicas on a virtual clock, with the routers' own placement and the daemon's own scheduler.

script         what happens to the replicas, and when: failures, drains, restarts, joins
conversations  who talks: conversations in progress when the clock starts, new ones, forks
replica        one replica, with its scheduler or as a count of turns
owners         who owns which conversation, and the loads that follow
network        the links of the hosts, over which KV goes
hand_over      whether KV is sent to a new home, and when it is there
tally          what is counted, by the time between two happenings
cluster        all of it under one clock
limits         how many replicas one history service carries, and what another region costs a turn
"""
