//! The registry over HTTP.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tower_http::timeout::TimeoutLayer;

use super::{BODY_BYTES_MAX, Refusal, Registry};

/// Time for a request, and for its head.
const REQUEST_TIME: Duration = Duration::from_secs(10);
/// Time for a connection, whatever is asked over it: peers connect again.
const CONNECTION_TIME: Duration = Duration::from_secs(300);
/// Most connections at a time.
const CONNECTIONS_MAX: usize = 256;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How a registry is served.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Time after which a machine without a sign of life is taken off the list.
    pub stale_after: Duration,
    /// What a request must have as bearer token; `None` takes all.
    pub token: Option<String>,
}

struct Shared {
    registry: Mutex<Registry>,
    token: Option<String>,
}

type App = Arc<Shared>;

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a request that does not have the token.
    fn check(&self, headers: &HeaderMap) -> Result<(), (StatusCode, String)> {
        let Some(token) = &self.token else { return Ok(()) };
        let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let wanted = format!("Bearer {token}");
        // Hashes take the same time to compare whatever is given.
        let same =
            given.is_some_and(|given| blake3::hash(given) == blake3::hash(wanted.as_bytes()));
        match same {
            true => Ok(()),
            false => Err((
                StatusCode::UNAUTHORIZED,
                "the request has another --cluster-key than the registry, or none".to_owned(),
            )),
        }
    }
}

fn answer(result: Result<Value, (StatusCode, String)>) -> Response {
    let (status, body) = match result {
        Ok(body) => (StatusCode::OK, body),
        Err((status, why)) => (status, json!({ "error": why })),
    };
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn refused(refusal: &Refusal) -> (StatusCode, String) {
    let status = match refusal {
        Refusal::Bad(_) => StatusCode::BAD_REQUEST,
        Refusal::Unknown(_) => StatusCode::NOT_FOUND,
        Refusal::Full => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, refusal.to_string())
}

/// What a machine may ask for with a body.
type Change = fn(&mut Registry, &[u8], Instant) -> Result<Value, Refusal>;

fn change(app: &App, headers: &HeaderMap, body: &Bytes, change: Change) -> Response {
    answer(app.check(headers).and_then(|()| {
        change(&mut app.registry(), body, Instant::now()).map_err(|refusal| refused(&refusal))
    }))
}

async fn register(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Response {
    change(&app, &headers, &body, Registry::register)
}

async fn heartbeat(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Response {
    change(&app, &headers, &body, Registry::heartbeat)
}

async fn deregister(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Response {
    change(&app, &headers, &body, Registry::deregister)
}

async fn topology(State(app): State<App>, headers: HeaderMap) -> Response {
    answer(app.check(&headers).map(|()| app.registry().topology(Instant::now())))
}

async fn unknown() -> Response {
    let paths = "/v1/cluster/register, heartbeat, deregister (POST), topology and /health (GET)";
    answer(Err((StatusCode::NOT_FOUND, format!("no such path; there are {paths}"))))
}

/// Serves a registry on a listening socket for ever.
pub fn serve(listener: TcpListener, options: ServerOptions) -> io::Result<Infallible> {
    let app = Arc::new(Shared {
        registry: Mutex::new(Registry::new(options.stale_after)),
        token: options.token,
    });
    let router = Router::new()
        .route("/v1/cluster/register", post(register))
        .route("/v1/cluster/heartbeat", post(heartbeat))
        .route("/v1/cluster/deregister", post(deregister))
        .route("/v1/cluster/topology", get(topology))
        .route("/health", get(topology))
        .fallback(unknown)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, REQUEST_TIME))
        .with_state(app);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(accept(listener, router))
}

async fn accept(listener: TcpListener, router: Router) -> io::Result<Infallible> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // Further connections wait in the system's queue.
        let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut builder = Builder::new(TokioExecutor::new()).http1_only();
            builder.http1().timer(TokioTimer::new()).header_read_timeout(REQUEST_TIME);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            // A peer that goes away is no matter.
            let _ = tokio::time::timeout(CONNECTION_TIME, connection).await;
            drop(place);
        });
    }
}
