//! The Agent reconciler, in five steps: observe → validate → desired → apply → status.
