//! Expert workers on other machines.
//!
//! `wire` has the messages: pure functions and readers over bytes, free of sockets, threads and
//! clocks. `worker` computes routed experts for whoever asks over TCP. It knows nothing of
//! attention, sessions or tokens, and holds no weight but routed experts.

pub mod wire;
pub mod worker;
