//! What Sensors do with what they hear: pure rules, and the sources that listen.
//!
//! Owns how an event becomes a [`delivery`]: expressions, sameness, pace, signals. Knows neither journals nor links: who
//! runs it, a worker or a sensor pod, keeps its state and passes on what comes of it. Time comes in from outside.

pub mod delivery;
