"""The search behind `graphpp.schedule_auto`: the order of F, B, I and W that ends soonest within each rank's memory."""
