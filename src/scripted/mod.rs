//! The built-in Scripted model: a deterministic script of answers, for demos and tests without a key.
//!
//! Pure: a script's text in, answers out. It is a product feature and honest about it: its answers say which model
//! gave them, and its usage is counted from real bytes by a stated rule. Imports nothing of ours but `api`.
