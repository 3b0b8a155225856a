//! What a prompt contains, and what leaves it.

pub mod budget_health;
pub mod compaction;
pub mod digest;
pub mod history_exclusion;
pub mod images;
pub mod prompt;
pub mod prompt_size;
pub mod window;
