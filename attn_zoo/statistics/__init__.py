"""What samples allow us to say: medians and means with intervals, and comparisons of two models or two curves.

Intervals are 95 %. Everything random is seeded, so that a report made twice is the same twice.
"""
