// The page of alerts: the form has the fields of the condition, and a running delivery is followed.
import { wish } from 'unread_badge'
import { localTimes } from 'formats'
import { createTabs } from 'tabs'
import { toast } from 'page'
import { still } from 'dom_updates'

const FOLLOW_MS = 2000
/** Polls after which the user may reload the page. */
const MAX_POLLS = 30

createTabs(document.querySelector('main'), () => {})
/** @type {any} */
const dialog = document.querySelector('#new-rule')
if ('open' in dialog.dataset) dialog.showPopover()

const form = document.querySelector('[data-rule-form]')
const [scope, condition] = [form.querySelector('[data-scope]'), form.querySelector('[data-condition]')]
const show = () => {
  const isOfService = scope.value === 'service'
  for (const option of condition.options) option.hidden = option.disabled = 'service' in option.dataset !== isOfService
  if (!condition.selectedOptions[0] || condition.selectedOptions[0].disabled)
    condition.value = condition.querySelector('option:enabled').value
  const { value, metric } = condition.selectedOptions[0].dataset
  const asked = { run: scope.value === 'run', project: scope.value === 'project', metric: metric !== undefined, value }
  for (const label of form.querySelectorAll('[data-of]')) label.hidden = !asked[label.dataset.of]
  if (value) form.querySelector('[data-value-label]').textContent = value[0].toUpperCase() + value.slice(1)
}
form.addEventListener('change', show)
show()

const deliveries = document.querySelector('[data-deliveries]')
let polls = 0
/** @param {Element} received */
const draw = (received) => {
  deliveries.innerHTML = received.innerHTML
  localTimes(deliveries)
  const [channel, what, state] = deliveries.querySelectorAll('tbody tr:first-child td')
  if (state)
    document.querySelector('[data-message]').textContent =
      `${channel.textContent}, ${what.textContent}: ${state.textContent}`
}
const follow = async () => {
  if (!deliveries.querySelector('[data-waiting]') || polls++ === MAX_POLLS) return
  try {
    const answer = await fetch(location.href, { headers: { Accept: 'text/html' } })
    const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
    const received = page.querySelector('[data-deliveries]')
    if (received && !deliveries.querySelector('details[open]')) still(() => draw(received))
  } catch {
    /* the server is away: later */
  }
  setTimeout(follow, FOLLOW_MS)
}
setTimeout(follow, FOLLOW_MS)

const button = document.querySelector('[data-browser-wish]')
if ('Notification' in window) {
  const press = () => {
    button.setAttribute('aria-pressed', String(wish.is() && Notification.permission === 'granted'))
  }
  button.hidden = false
  press()
  button.addEventListener('click', async () => {
    if (button.getAttribute('aria-pressed') === 'true') wish.set(false)
    else wish.set((await Notification.requestPermission()) === 'granted')
    press()
    if (Notification.permission === 'denied') toast('The settings of this browser for this site block notifications.')
  })
}
