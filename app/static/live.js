// The only place that opens an EventSource. A hidden page lets go of its stream, since browsers
// allow six connections to a server, and takes it up again at the cursor that it had.

/**
 * @param {string} url
 * @param {string} cursor of what the page shows already
 * @param {(news: any) => void} onNews
 */
export const watch = (url, cursor, onNews) => {
  const badge = document.querySelector('[data-connection]')
  let source = null
  let retry = 0

  const open = () => {
    source = new EventSource(`${url}?after=${encodeURIComponent(cursor)}`)
    source.onopen = () => { badge.hidden = true }
    source.onmessage = (event) => {
      onNews(JSON.parse(event.data))
      cursor = event.lastEventId
    }
    // The browser's own reconnection repeats the first address; ours knows the latest cursor, and
    // comes back after an error too.
    source.onerror = () => {
      badge.hidden = false
      close()
      retry = setTimeout(open, 1000)
    }
  }
  const close = () => {
    clearTimeout(retry)
    source?.close()
    source = null
  }
  const follow = () => {
    close()
    if (!document.hidden) open()
  }
  document.addEventListener('visibilitychange', follow)
  addEventListener('pagehide', close)
  addEventListener('pageshow', (event) => { if (event.persisted) follow() })
  follow()
}
