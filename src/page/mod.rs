//! The page about loops: their state, their usage and what they did last, in a browser, live.
//!
//! Owns what `agentloop run` and the controller share: the values of a page ([`view::PageView`] is the contract), their
//! HTML, the format of the stream, and what every response forbids. The server decides who may read what. Read-only;
//! contains no text of a prompt or an answer, and decides nothing about loops.

pub mod agent_rows;
pub mod html;
pub mod live;
pub mod recent;
pub mod responses;
pub mod sensor_rows;
pub mod view;
