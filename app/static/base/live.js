// The only place that opens an EventSource. A hidden page lets go of its stream, since browsers
// allow six connections to a server, and takes it up again at the cursor that it had.

import { patience, silence } from 'http'

/** Answers after which asking again leads nowhere: signed out, or there is no such thing. */
const FINAL = { 401: 'signed out: sign in again', 403: 'not allowed', 404: 'this is gone' }

/** How often the badge tells for how long the server has been away. */
const TELL_MS = 1000

/**
 * @param {string} url
 * @param {string} cursor of what the page shows already
 * @param {(news: any) => void} onNews news that say is_over are the last
 * @param {Record<string, string|string[]>} [query] what of the news is asked for, if not all: parts, columns, metrics
 * @returns {{ask: (query: Record<string, string|string[]>) => void}} to ask for something else from now on
 */
export const follow = (url, cursor, onNews, query = {}) => {
  const badge = document.querySelector('[data-connection]')
  /** @type {EventSource|null} */
  let source = null
  let retry = 0
  let [isOver, isOpen] = [false, false]
  let heardAt = Date.now() // until when the page is up to date
  let telling = 0
  const waits = patience()

  const open = () => {
    const asked = new URLSearchParams({ after: cursor })
    for (const [name, value] of Object.entries(query)) for (const each of [value].flat()) asked.append(name, each)
    const address = `${url}?${asked}`
    source = new EventSource(address)
    source.onopen = () => {
      isOpen = true
      clearInterval(telling)
      badge.hidden = true
    }
    source.onmessage = (event) => {
      waits.reset()
      const news = JSON.parse(event.data)
      cursor = event.lastEventId
      if (news.is_over) end()
      onNews(news)
    }
    // The browser's own reconnection repeats the first address; ours knows the latest cursor, and
    // comes back after an error too.
    source.onerror = () => {
      const wasRefused = source?.readyState === EventSource.CLOSED
      close()
      clearInterval(telling)
      telling = setInterval(tell, TELL_MS)
      tell()
      badge.hidden = false
      retry = setTimeout(() => (wasRefused ? ask(address) : open()), waits.next())
    }
  }
  const tell = () => { badge.textContent = silence(heardAt, Date.now()) }
  /** An EventSource does not tell why it was refused; it may be for good. @param {string} address */
  const ask = async (address) => {
    const control = new AbortController()
    const status = await fetch(address, { signal: control.signal }).then((answer) => answer.status, () => 0)
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
    if (isOpen) heardAt = Date.now()
    isOpen = false
    source?.close()
    source = null
  }
  const end = () => {
    isOver = true
    clearInterval(telling)
    close()
  }
  const takeUp = () => {
    close()
    if (!document.hidden && !isOver) open()
  }
  document.addEventListener('visibilitychange', takeUp)
  addEventListener('pagehide', close)
  addEventListener('pageshow', (event) => { if (event.persisted) takeUp() })
  takeUp()
  return {
    ask: (wanted) => {
      query = wanted
      takeUp()
    },
  }
}
