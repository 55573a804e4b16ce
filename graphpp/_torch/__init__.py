"""Every private name of torch that graphpp uses; each file lists its names and the versions of torch they were checked on."""
