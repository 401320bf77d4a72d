//! Expert workers on other machines.
//!
//! `wire` has the messages: pure functions and readers over bytes, free of sockets, threads and
//! clocks. `worker` computes routed experts for whoever asks over TCP, `coordinator` asks. They
//! know nothing of attention, sessions or tokens, and hold no weight but routed experts.

pub mod coordinator;
mod items;
mod tcp;
pub mod wire;
pub mod worker;
