"""From a plan to programs: memory, recorders, probe, capture, replay. All use of torch.cuda."""
