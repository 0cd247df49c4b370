// Many rows of a list: ticked one by one, in ranges or all, and what is done with them at once.
import { insisted } from 'http'
import { count, size } from 'formats'
import { keptOffer, reload, toast } from 'page'
import { root } from 'root'
import { matchRows } from 'rows'
import { still } from 'dom_updates'

const MOST_COMPARED = 50
/** Messages of completed actions, by number of runs. @type {Record<string, (runs: string, text: string) => string>} */
const DONE = {
  add_tag: (runs, tag) => `Tag ${tag} added to ${runs}.`,
  remove_tag: (runs, tag) => `Tag ${tag} removed from ${runs}.`,
  cancel: (runs) => `Cancellation of ${runs} requested.`,
  delete: (runs) => `${runs} in the trash.`,
  restore: (runs) => `${runs} restored.`,
  erase: (runs) => `Deleting ${runs} permanently.`,
  move: (runs, project) => `${runs} moved to ${project || 'Default project'}.`,
}
/** @param {number} n */
const inWords = (n) => (n === 1 ? '1 run' : `${count(n)} runs`)

/** Fetch this very page again, and bring its rows up to date. @param {HTMLElement} body */
export const refetchRows = async (body) => {
  const address = new URL(location.href)
  // The default columns go by the listed runs, and those of an open page stay.
  if (body.dataset.columns) address.searchParams.set('current', body.dataset.columns)
  const answer = await insisted(address.href)
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
  const fresh = page.querySelector('[data-rows]')
  if (!fresh) return still(reload)
  still(() => {
    matchRows(body, document.adoptNode(fresh))
    for (const part of [
      '[data-disk]',
      '[data-total]',
      '.range',
      '.pages',
      ...(document.querySelector('.view-tabs:focus-within') ? [] : ['.view-tabs']),
    ]) {
      const [old, now] = [document.querySelector(part), page.querySelector(part)]
      if (now) old?.replaceWith(document.adoptNode(now))
    }
  })
}

/** Runs that one request may act on, or list. */
const MOST_ASKED = 200
const ENDED = ['finished', 'failed', 'cancelled']

/** All runs that the page's filter matches. @returns {Promise<{id: string, canCancel: boolean}[]>} */
const everyMatch = async () => {
  const found = []
  const filter = new URLSearchParams(location.search).get('filter') ?? ''
  for (let next = ''; next !== null;) {
    const query = new URLSearchParams({ filter, limit: String(MOST_ASKED), ...(next && { before: next }) })
    const page = await (await insisted(`${root}/api/v1/runs?${query}`)).json()
    for (const { id, status, source } of page.runs)
      found.push({ id: String(id), canCancel: !ENDED.includes(status) && source !== 'watch' })
    next = page.next && String(page.next)
  }
  return found
}

/**
 * @param {string} action
 * @param {number[]} runs
 * @param {{tag?: string, project?: string}} to
 * @returns {Promise<{done: number[], refused: {id: number, detail: string}[]}>}
 */
const ask = async (action, runs, to) => {
  /** @type {{done: number[], refused: {id: number, detail: string}[]}} */
  const all = { done: [], refused: [] }
  for (let i = 0; i < runs.length; i += MOST_ASKED) {
    const { done, refused } = await askSome(action, runs.slice(i, i + MOST_ASKED), to)
    all.done.push(...done)
    all.refused.push(...refused)
  }
  return all
}

/** @param {string} action @param {number[]} runs @param {{tag?: string, project?: string}} to */
const askSome = async (action, runs, to) => {
  const answer = await fetch(`${root}/api/v1/runs/bulk`, {
    method: 'POST',
    headers: {
      'X-CSRF-Token': document.querySelector('meta[name=csrf-token]').content,
      'Content-Type': 'application/json',
    },
    body: JSON.stringify({ action, runs, ...to }),
  })
  const result = await answer.json()
  if (!answer.ok) throw new Error(result.detail)
  return result
}

/** Offer to restore the runs after whose deletion none was left, so that the page was loaded again. */
export const offerRestore = () => {
  const runs = keptOffer().split(',').filter(Boolean).map(Number)
  if (!runs.length) return
  const act = async () => {
    try {
      const { done } = await ask('restore', runs, {})
      toast(DONE.restore(inWords(done.length), ''))
      reload()
    } catch (error) {
      toast(
        error instanceof Error && !(error instanceof TypeError)
          ? error.message
          : 'The server does not answer. Nothing was changed.',
      )
    }
  }
  toast(DONE.delete(inWords(runs.length), ''), { label: 'Undo', act })
}

/**
 * @param {Found} list with boxes named run, and the bar
 * @param {() => Promise<void>} refetch brings its rows up to date
 * @returns {() => void} to be called when rows came or went
 */
export const createSelection = (list, refetch) => {
  const bar = list.querySelector('[data-selection]')
  const tag = bar.querySelector('[data-tag]')
  const project = bar.querySelector('[data-project]')
  const refused = bar.querySelector('[data-refused]')
  const boxes = () => [...list.querySelectorAll('[name=run]:not(:disabled)')]
  const ticked = () => boxes().filter((box) => box.checked)
  let last = '' // run whose box was clicked last: a range goes from there
  /** Runs on other pages that are selected too. @type {{id: string, canCancel: boolean}[]} */
  let elsewhere = []
  const selected = () => [...ticked().map(({ value }) => value), ...elsewhere.map(({ id }) => id)]
  const every = bar.querySelector('[data-every]')

  /** Offer to move a single queued run, by the forms of its row. @param {Found[]} chosen */
  const showQueue = (chosen) => {
    const part = bar.querySelector('[data-queue]')
    const row = chosen.length === 1 ? chosen[0].closest('tr[data-priority]') : null
    if (!part) return
    part.hidden = !row || elsewhere.length > 0
    if (!row) return
    for (const button of part.querySelectorAll('[data-to]')) {
      button.setAttribute('formaction', `${root}/runs/${row.dataset.key}/${button.dataset.to}`)
      const priority = Number(row.dataset.priority) + Number(button.dataset.by ?? 0)
      button.value = String(priority)
      button.disabled = button.dataset.by ? Math.abs(priority) > 100 : row.dataset.ahead === '0'
    }
  }
  /** Report the selected runs. */
  const announce = () =>
    list.dispatchEvent(new CustomEvent('selection', { detail: ticked().map(({ value }) => value) }))
  const refresh = () => {
    announce()
    const [all, chosen] = [boxes(), ticked()]
    // By class: a rule with :has() would be matched again for all rows at each live change.
    document.body.classList.toggle('has-selected', chosen.length > 0)
    for (const box of all) box.closest('tr')?.classList.toggle('selected', box.checked)
    if (chosen.length < all.length) elsewhere = []
    for (const button of list.querySelectorAll('button[data-one]')) button.disabled = false
    const ids = selected()
    for (const box of list.querySelectorAll('[data-tick-all]')) {
      box.checked = chosen.length > 0 && chosen.length === all.length
      box.indeterminate = chosen.length > 0 && chosen.length < all.length
    }
    const text = ids.length ? `${count(ids.length)} selected` : ''
    if (every) every.hidden = chosen.length < all.length || elsewhere.length > 0
    const cancel = bar.querySelector('[data-act=cancel]')
    if (cancel)
      cancel.hidden =
        !chosen.some((box) => box.closest('[data-can-cancel]')) && !elsewhere.some(({ canCancel }) => canCancel)
    const counter = bar.querySelector('[data-ticked]')
    if (counter.textContent !== text) counter.textContent = text // so that it is announced when it changes
    if (!chosen.length) refused.replaceChildren()
    document.body.classList.toggle('has-refused', refused.childElementCount > 0)
    showQueue(chosen)
    const addresses = bar.querySelector('[data-addresses]')
    if (addresses) addresses.dataset.copyText = ids.map((id) => `${location.origin}${root}/runs/${id}`).join('\n')
    const compare = bar.querySelector('[data-compare]')
    if (!compare) return
    const isPossible = ids.length > 1 && ids.length <= MOST_COMPARED
    compare.toggleAttribute('aria-disabled', !isPossible)
    compare.title = isPossible ? '' : `2 to ${MOST_COMPARED} runs can be compared`
    if (isPossible) compare.href = `${root}/compare?runs=${ids.join(',')}`
    else compare.removeAttribute('href')
    const report = bar.querySelector('[data-to-report]')
    if (!report) return
    report.toggleAttribute('aria-disabled', ids.length > MOST_COMPARED)
    report.title = ids.length > MOST_COMPARED ? `At most ${MOST_COMPARED} runs fit into a panel` : ''
    if (ids.length > MOST_COMPARED) report.removeAttribute('href')
    else report.href = `${root}/reports/new?runs=${ids.join(',')}&metrics=loss`
  }

  /** @param {string} action @param {number[]} ids */
  const act = async (action, ids) => {
    if (action === 'erase' && !(await isConfirmed(ids))) return
    const text = (action === 'move' ? project?.value : tag?.value.trim()) ?? ''
    const isTagging = action.endsWith('_tag')
    if (isTagging && !text) return tag.focus()
    bar.inert = true
    try {
      const { done, refused: others } = await ask(
        action,
        ids,
        action === 'move' ? { project: text } : isTagging ? { tag: text } : {},
      )
      if (!isTagging) elsewhere = []
      showResult(action, done, others, text)
      // Its own button may go, and a cell in use stays.
      if (!bar.contains(document.activeElement)) list.focus({ preventScroll: true })
      await refetch()
    } catch (error) {
      toast(
        error instanceof Error && !(error instanceof TypeError)
          ? error.message
          : 'The server does not answer. Nothing was changed.',
      )
    } finally {
      bar.inert = false
      refresh()
    }
  }

  /**
   * @param {string} action
   * @param {number[]} done
   * @param {{id: number, detail: string}[]} others
   * @param {string} text
   */
  const showResult = (action, done, others, text) => {
    if (!action.endsWith('_tag')) for (const box of ticked()) if (done.includes(Number(box.value))) box.checked = false
    refused.replaceChildren(
      ...others.map(({ detail }) => Object.assign(document.createElement('p'), { textContent: detail })),
    )
    const undo = { label: 'Undo', act: () => act('restore', done), kept: done.join() }
    if (done.length) toast(DONE[action](inWords(done.length), text), action === 'delete' ? undo : undefined)
  }

  /** @param {number[]} ids @returns {Promise<boolean>} */
  const isConfirmed = (ids) => {
    const dialog = list.querySelector('[data-confirm]')
    const those = boxes().filter((box) => ids.includes(Number(box.value)))
    const bytes = those.reduce((sum, box) => sum + Number(box.dataset.bytes), 0)
    const what = those.length === 1 ? those[0].getAttribute('aria-label')?.replace('Select ', '') : inWords(ids.length)
    dialog.querySelector('[data-confirm-text]').textContent =
      `Delete ${what}, and ${size(bytes)} of files permanently? This cannot be undone.`
    dialog.showModal()
    return new Promise((resolve) => {
      dialog.querySelector('[data-yes]').onclick = () => {
        resolve(true)
        dialog.close()
      }
      dialog.querySelector('[data-no]').onclick = () => dialog.close()
      dialog.onclose = () => resolve(false)
    })
  }

  list.addEventListener('click', (event) => {
    const { target, shiftKey } = event
    if (target.matches('[name=run]')) {
      const [all, from] = [boxes(), boxes().findIndex((box) => box.value === last)]
      const to = all.indexOf(target)
      if (shiftKey && from >= 0)
        for (const box of all.slice(Math.min(from, to), Math.max(from, to) + 1)) box.checked = target.checked
      last = target.value
    } else if (target.closest('[data-act]')) {
      event.preventDefault()
      target.closest('[popover]')?.hidePopover()
      act(target.closest('[data-act]').dataset.act, selected().map(Number))
    } else if (target.closest('[data-clear]')) {
      for (const box of boxes()) box.checked = false
      refresh()
    } else if (target === every) {
      selectEvery()
    } else if (target.matches('[data-one]')) {
      act(target.dataset.one, [Number(target.value)])
    }
  })
  const selectEvery = async () => {
    const here = new Set(boxes().map(({ value }) => value))
    try {
      elsewhere = (await everyMatch()).filter(({ id }) => !here.has(id))
    } catch {
      toast('The server does not answer. Only the runs of this page are selected.')
    }
    refresh()
  }
  list.addEventListener('change', ({ target }) => {
    if (target.matches('[data-tick-all]')) for (const box of boxes()) box.checked = target.checked
    refresh()
  })
  // A Shift-click shall select rows, not their text.
  list.addEventListener('mousedown', (event) => {
    if (event.shiftKey && event.target.matches('[name=run]')) event.preventDefault()
  })
  tag?.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter') return
    event.preventDefault()
    tag.closest('[popover]')?.hidePopover()
    act('add_tag', selected().map(Number))
  })
  list.tabIndex = -1
  addEventListener('pageshow', refresh) // after Back a browser ticks the boxes again without an event
  refresh()
  return refresh
}
