"""The search behind `graphpp.schedule_auto`: the order of F, B, I and W that ends soonest within each rank's memory.

`scheduler` is the recipe and the only file that others import. May import every other package of `graphpp.schedules`.
"""
