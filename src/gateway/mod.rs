//! The gateway: the pod's only way out. Holds the provider key and the link token, counts every call.
//!
//! Owns the record of calls and their usage (its counts, never the worker's, feed status), and the link's client side.
