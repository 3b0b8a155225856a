//! The worker: drives the engine, keeps the journal, speaks to models through the gateway's socket.
//!
//! Does what the engine's effects say and feeds the results back. Holds no secret and no network identity.
