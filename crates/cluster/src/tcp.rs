//! Reads and writes of TCP streams that end by a deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// Rest after which the system asks a silent peer whether it is there, how often, and how many
/// times.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMES: u32 = 3;

/// Why a stream is of no more use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TcpError {
    /// The deadline has passed.
    #[error("it is too slow: a message must come, and be taken, in time")]
    Slow,
    /// The peer has closed it.
    #[error("it went away in the middle of a message")]
    Cut,
    /// The system's answer.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Sends small messages at once, and finds out about peers that are gone.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_TIMES)?;
    Ok(())
}

/// Time left until a deadline.
fn time_left(deadline: Instant) -> Result<Duration, TcpError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(TcpError::Slow) } else { Ok(left) }
}

/// Writes all bytes.
pub(crate) fn write_until(
    mut stream: &TcpStream,
    mut bytes: &[u8],
    deadline: Instant,
) -> Result<(), TcpError> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(time_left(deadline)?))?;
        match stream.write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) => give_up_unless_interrupted(error)?,
        }
    }
    Ok(())
}

/// Reads some bytes, at least one.
pub(crate) fn read_until(
    mut stream: &TcpStream,
    buffer: &mut [u8],
    deadline: Instant,
) -> Result<usize, TcpError> {
    loop {
        stream.set_read_timeout(Some(time_left(deadline)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(TcpError::Cut),
            Ok(read) => return Ok(read),
            Err(error) => give_up_unless_interrupted(error)?,
        }
    }
}

fn give_up_unless_interrupted(error: io::Error) -> Result<(), TcpError> {
    match error.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Err(TcpError::Slow),
        _ => Err(error.into()),
    }
}
