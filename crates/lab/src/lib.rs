//! Work on models rather than with them: conversion, synthetic models, scoring, benches.

pub mod bench;
pub mod check;
pub mod convert;
mod error;
pub mod manifest;
pub mod mirror;
pub mod plan;
pub mod score;
pub mod shard;
pub mod synth;
pub mod tune;

pub use error::LabError;
