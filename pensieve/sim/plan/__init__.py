"""Plans capacity, by what one replica carries and how many replicas a load needs.

load        conversations per second, as a rate that can be set
replica     one engine under a load, and whether it serves it within limits
capacity    the highest rate that one replica carries, and what host memory adds to it
routing     which of several replicas serves which turn
fleet       several replicas: what they carry together, and how many a rate needs
planning    the whole plan
"""
