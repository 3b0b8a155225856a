//! What several modules need and no rule of the product depends on: elapsed time, backoff, bounded queues, hashes, listening
//! sockets, shortened texts, limits on connections (feature `connections`), JSON schemas (feature `json-schema`), random names
//! (feature `random`), SQLite files (feature `sqlite`) and Unix sockets (feature `unix-socket`).

pub mod backoff;
pub mod bounded;
pub mod clock;
#[cfg(feature = "connections")]
pub mod connections;
#[cfg(feature = "sqlite")]
pub mod disk;
pub mod hash;
#[cfg(feature = "json-schema")]
pub mod json_schema;
pub mod listener;
#[cfg(feature = "random")]
pub mod random;
#[cfg(feature = "json-schema")]
mod schema_bounds;
pub mod text;
#[cfg(feature = "unix-socket")]
pub mod unix_socket;
