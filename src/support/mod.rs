//! What several rooms need and no rule of the product depends on: elapsed time, limits on connections, SQLite files.

pub mod clock;
pub mod connections;
pub mod disk;
