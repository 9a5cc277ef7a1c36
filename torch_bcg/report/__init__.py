"""Plans and counters -> text, a page, files, traces. Observes and never decides."""
