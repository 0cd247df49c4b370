// The bell of every page: the number of unread alerts, and browser notifications if enabled.

import { root } from 'root'

const POLL_MS = 20000
const [WISH, LAST] = ['alerts-in-browser', 'last-notice']
const badge = document.querySelector('[data-unread]')

/** A browser may keep nothing for pages. @param {() => any} use */
const kept = (use) => {
  try {
    return use()
  } catch {
    return null
  }
}

/** State of browser notifications: whether they are enabled. */
export const wish = {
  is: () => kept(() => localStorage.getItem(WISH)) === 'yes',
  /** @param {boolean} is */
  set: (is) => {
    kept(() => (is ? localStorage.setItem(WISH, 'yes') : localStorage.removeItem(WISH)))
  },
}

/** @param {{id: number, text: string, run_id: number}[]} newest */
const notify = (newest) => {
  const before = kept(() => localStorage.getItem(LAST))
  if (newest.length || before === null) kept(() => localStorage.setItem(LAST, String(newest.at(-1)?.id ?? 0)))
  // Alerts from before the first poll are on the page already.
  if (before === null || !wish.is() || !('Notification' in window) || Notification.permission !== 'granted') return
  for (const each of newest) {
    // Of two tabs' the tag makes one.
    const shown = new Notification('Halfstep', { body: each.text, tag: `halfstep-${each.id}` })
    shown.addEventListener('click', () => {
      focus()
      location.assign(`${root}/runs/${each.run_id}`)
    })
  }
}

const poll = async () => {
  if (document.hidden && !wish.is()) return
  try {
    const after = Number(kept(() => localStorage.getItem(LAST)) ?? 0)
    const answer = await fetch(`${root}/api/v1/alerts/inbox/unread?after=${after}`)
    if (!answer.ok) return
    const { unread, newest } = await answer.json()
    badge.hidden = !unread
    badge.querySelector('b').textContent = unread < 100 ? unread : '99+'
    notify(newest)
  } catch {
    /* the server is away: later */
  }
}

if (badge) {
  poll()
  setInterval(poll, POLL_MS)
  document.addEventListener('visibilitychange', poll)
}
