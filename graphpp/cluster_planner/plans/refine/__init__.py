"""Settings improved once their bytes or seconds are known: least offload, least recomputation, faster orders."""
