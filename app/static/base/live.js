// The only place that opens an EventSource. A hidden page closes its stream, because browsers allow
// six connections per server, and reopens it at its last cursor.

import { patience, silence } from 'http'

/** Final responses: a retry would fail too. */
const FINAL = { 401: 'Signed out: sign in again', 403: 'not allowed', 404: 'this is gone' }

/** Update interval of the badge while the server is away. */
const BADGE_MS = 1000

/**
 * The revision of a run that a cursor stands for; -1: more of the same one is to come.
 * @param {string} cursor as db.telemetry.series.Cursor writes it
 */
export const revisionOf = (cursor) => Number(cursor.split('.')[1])

/**
 * @param {string} url
 * @param {string} cursor of the page's present state
 * @param {(message: any, cursor: string) => void} onMessage is called with each message and the cursor after it; one
 *   with is_over is the last
 * @param {Record<string, string|string[]>} [query] requested parts, columns and metrics; default: all
 * @returns {{ask: (query: Record<string, string|string[]>) => void}} changes the query from now on
 */
export const follow = (url, cursor, onMessage, query = {}) => {
  const badge = document.querySelector('[data-connection]')
  /** @type {EventSource|null} */
  let source = null
  let retry = 0
  let [isOver, isOpen] = [false, false]
  let receivedAt = Date.now() // until when the page is up to date
  let timer = 0
  const waits = patience()

  const open = () => {
    const asked = new URLSearchParams({ after: cursor })
    for (const [name, value] of Object.entries(query)) for (const each of [value].flat()) asked.append(name, each)
    const address = `${url}?${asked}`
    source = new EventSource(address)
    source.onopen = () => {
      isOpen = true
      clearInterval(timer)
      badge.hidden = true
    }
    source.onmessage = (event) => {
      waits.reset()
      const message = JSON.parse(event.data)
      cursor = event.lastEventId
      if (message.is_over) end()
      onMessage(message, cursor)
    }
    // The browser's own reconnection repeats the first URL; this one uses the latest cursor, and
    // retries after an error too.
    source.onerror = () => {
      const wasRefused = source?.readyState === EventSource.CLOSED
      close()
      clearInterval(timer)
      timer = setInterval(showSilence, BADGE_MS)
      showSilence()
      badge.hidden = false
      retry = setTimeout(() => (wasRefused ? ask(address) : open()), waits.next())
    }
  }
  const showSilence = () => {
    badge.textContent = silence(receivedAt, Date.now())
  }
  /** An EventSource does not expose the status of a failure, which may be final. @param {string} address */
  const ask = async (address) => {
    const control = new AbortController()
    const status = await fetch(address, { signal: control.signal }).then(
      (answer) => answer.status,
      () => 0,
    )
    control.abort()
    if (!(status in FINAL)) {
      if (!document.hidden && !isOver && !source) open()
      return
    }
    end()
    badge.hidden = false
    badge.textContent = FINAL[status]
  }
  const close = () => {
    clearTimeout(retry)
    if (isOpen) receivedAt = Date.now()
    isOpen = false
    source?.close()
    source = null
  }
  const end = () => {
    isOver = true
    clearInterval(timer)
    close()
  }
  const takeUp = () => {
    close()
    if (!document.hidden && !isOver) open()
  }
  document.addEventListener('visibilitychange', takeUp)
  addEventListener('pagehide', close)
  addEventListener('pageshow', (event) => {
    if (event.persisted) takeUp()
  })
  takeUp()
  return {
    ask: (wanted) => {
      query = wanted
      takeUp()
    },
  }
}
