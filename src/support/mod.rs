//! What several rooms need and no rule of the product depends on: elapsed time, backoff, hashes, shortened texts, limits
//! on connections (feature `connections`), JSON schemas (feature `json-schema`) and SQLite files (feature `sqlite`).

pub mod backoff;
pub mod clock;
#[cfg(feature = "connections")]
pub mod connections;
#[cfg(feature = "sqlite")]
pub mod disk;
pub mod hash;
#[cfg(feature = "json-schema")]
pub mod json_schema;
pub mod text;
