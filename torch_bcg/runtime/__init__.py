"""From a plan to programs: memory, recorders, probe, capture, replay. The only code that uses torch.cuda."""
