//! Tasks of a user: one that is waited for, and a conversation that is made of them.

pub mod conversation;
pub mod live_text;
pub mod task_run;

pub use conversation::Conversation;
pub use live_text::LiveText;
pub use task_run::{ReceivedTaskResponse, TaskEnd, TaskRun};
